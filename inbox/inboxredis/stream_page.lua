-- Reads dead letters, oldest first, up to a number of bytes, but at least one.
-- KEYS[1]: the dead letters. ARGV[1]: the start, "-" or "(" and an id; ARGV[2]: the last id, or "" for the newest letter;
-- ARGV[3]: bytes; ARGV[4]: the maximum number of letters.
-- Returns {the last id, {{id, {field, value, ...}}, ...}}, or {"", {}} if there are none.
local last = ARGV[2]
if last == '' then
  local newest = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
  if not newest then
    return {'', {}}
  end
  last = newest[1]
end
local from, page, bytes = ARGV[1], {}, 0
while bytes < tonumber(ARGV[3]) and #page < tonumber(ARGV[4]) do
  local letter = redis.call('XRANGE', KEYS[1], from, last, 'COUNT', 1)[1]
  if not letter then
    break
  end
  for _, text in ipairs(letter[2]) do
    bytes = bytes + #text
  end
  page[#page + 1] = letter
  from = '(' .. letter[1]
end
return {last, page}
