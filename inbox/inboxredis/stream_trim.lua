-- Removes the entries that all groups of a stream have processed.
-- KEYS[1]: the stream.
-- Returns the number of removed entries; Redis limits the number for one call.
local function before(a, b) -- compares two times or counts that are too large for Lua's numbers
  return #a < #b or #a == #b and a < b
end
local least, least_time, least_count
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local info = {}
  for n = 1, #group, 2 do
    info[group[n]] = group[n + 1]
  end
  local first = info['last-delivered-id']
  if info['pending'] > 0 then
    local pending = redis.call('XPENDING', KEYS[1], info['name'])[2]
    local time, count = string.match(pending, '(%d+)-(%d+)')
    local last_time, last_count = string.match(first, '(%d+)-(%d+)')
    if before(time, last_time) or time == last_time and before(count, last_count) then
      first = pending
    end
  end
  local time, count = string.match(first, '(%d+)-(%d+)')
  if not least or before(time, least_time) or time == least_time and before(count, least_count) then
    least, least_time, least_count = first, time, count
  end
end
if least and least ~= '0-0' then
  return redis.call('XTRIM', KEYS[1], 'MINID', '~', least)
end
return 0
