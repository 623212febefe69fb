-- Gives entries to a consumer name: first pending entries of any name that are idle, then new ones if the name holds the
-- lease.
-- KEYS as in stream_hold.lua. ARGV[1]: the group; ARGV[2]: the token of the lease, or ''; ARGV[3]: the name; ARGV[4]: the
-- number of entries; ARGV[5]: the idle time (ms) of an entry to take; ARGV[6] and ARGV[7]: the ids up to which the pending
-- entries of the stream and of the retries were read, or '' for the end.
-- Returns -1 if another process has the lease, otherwise {the next ARGV[6], the next ARGV[7], the entries that were pending,
-- each {1 or 2 for its stream, id, fields}, the new ones, the number of entries that were deleted while pending, and the
-- ids after which nothing is new, or '' if unknown}.
if ARGV[2] ~= '' and redis.call('GET', KEYS[3]) ~= ARGV[2] then
  return -1
end
local left = tonumber(ARGV[4])
local cursors, old, new, deleted, ends = {ARGV[6], ARGV[7]}, {}, {}, 0, {'', ''}
for i = 1, 2 do
  while left > 0 and cursors[i] ~= '' do
    -- XAUTOCLAIM scans ten entries for each one it may claim: too few if many entries are being processed.
    local idle = redis.call('XPENDING', KEYS[i], ARGV[1], 'IDLE', ARGV[5], cursors[i], '+', 1)
    local claimed = {'0-0', {}, {}}
    if #idle == 1 then
      claimed = redis.call('XAUTOCLAIM', KEYS[i], ARGV[1], ARGV[3], ARGV[5], idle[1][1], 'COUNT', left)
    end
    cursors[i] = claimed[1]
    if cursors[i] == '0-0' then
      cursors[i] = ''
    end
    for _, entry in ipairs(claimed[2]) do
      old[#old + 1] = {i, entry[1], entry[2]}
    end
    left = left - #claimed[2]
    deleted = deleted + #claimed[3]
  end
end
if ARGV[2] == '' or cursors[1] ~= '' or cursors[2] ~= '' then
  return {cursors[1], cursors[2], old, new, deleted, '', ''}
end
for i = 2, 1, -1 do
  local read = left > 0 and redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[3], 'COUNT', left, 'STREAMS', KEYS[i], '>')
  if read then
    for _, entry in ipairs(read[1][2]) do
      new[#new + 1] = {i, entry[1], entry[2]}
    end
    left = left - #read[1][2]
  end
end
for i = 1, 2 do
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[i])) do
    local info = {}
    for n = 1, #group, 2 do
      info[group[n]] = group[n + 1]
    end
    if info['name'] == ARGV[1] then
      ends[i] = info['last-delivered-id']
    end
  end
end
return {cursors[1], cursors[2], old, new, deleted, ends[1], ends[2]}
