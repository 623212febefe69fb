-- Reads waiting messages, the one due first at the start, up to a number of bytes, but at least one. Members of other
-- programs are left out.
-- KEYS[1]: the waiting messages. ARGV[1]: the due time (ms) where the page starts, or "-inf"; ARGV[2]: how many messages of
-- that time precede it; ARGV[3]: the last due time, or "" for that of the last message; ARGV[4]: bytes; ARGV[5]: the maximum
-- number of messages.
-- Returns {the last due time, {{due time, mark, {field, value, ...}}, ...}, 1 if there are more, else 0}.
local last = ARGV[3]
if last == '' then
  last = redis.call('ZREVRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
  if not last then
    return {'', {}, 0}
  end
end
local at, page, bytes, more = tonumber(ARGV[2]), {}, 0, 1
while bytes < tonumber(ARGV[4]) and #page < tonumber(ARGV[5]) do
  local one = redis.call('ZRANGEBYSCORE', KEYS[1], ARGV[1], last, 'WITHSCORES', 'LIMIT', at, 1)
  if #one == 0 then
    more = 0
    break
  end
  at = at + 1
  local ok, copy = pcall(cmsgpack.unpack, one[1])
  local ours = ok and type(copy) == 'table' and #copy > 1 and #copy % 2 == 1
  for i = 1, ours and #copy or 0 do
    ours = ours and type(copy[i]) == 'string'
  end
  if ours then
    bytes = bytes + #one[1]
    local mark = table.remove(copy, 1)
    page[#page + 1] = {one[2], mark, copy}
  end
end
return {last, page, more}
