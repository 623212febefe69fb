-- Hands entries to one consumer name: those that are pending and idle, whoever has them, and to the
-- holder of the lease new ones after that.
-- KEYS as in stream_hold.lua. ARGV[1] the group; ARGV[2] the token of the lease, '' without one;
-- ARGV[3] the name; ARGV[4] how many entries; ARGV[5] for how many milliseconds they must be idle;
-- ARGV[6] and ARGV[7] up to which id those of the stream and of the retries were looked at, '' to
-- the end.
-- Returns -1 when the lease is another's, else {ARGV[6] and ARGV[7] for the next time, the entries
-- that were pending, each {1 or 2 for its stream, id, fields}, the new ones, how many were deleted
-- while they were pending, and the ids after which there is nothing new, '' when that is not known}.
if ARGV[2] ~= '' and redis.call('GET', KEYS[3]) ~= ARGV[2] then
  return -1
end
local left = tonumber(ARGV[4])
local cursors, old, new, deleted, ends = {ARGV[6], ARGV[7]}, {}, {}, 0, {'', ''}
for i = 1, 2 do
  while left > 0 and cursors[i] ~= '' do
    -- XAUTOCLAIM passes over ten entries for each that it may claim: too few at once among many in work.
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
