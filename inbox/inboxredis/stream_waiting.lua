-- Reads waiting messages after a position, in the order of the sorted set, up to a number of bytes, but at least one. The
-- position is not a number: others may remove messages between two pages. Members of other programs are left out.
-- KEYS[1]: the waiting messages. ARGV[1]: the due time (ms) of the position, or "-inf"; ARGV[2]: the beginning of the member
-- there, or "" before the first page; ARGV[3]: the last due time, or "" for that of the last message; ARGV[4]: bytes;
-- ARGV[5]: the maximum number of messages.
-- Returns {the last due time, {{due time, mark, {field, value, ...}}, ...}, the beginning of the last member, or "" if there
-- are no more}.
local last = ARGV[3]
if last == '' then
  last = redis.call('ZREVRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
  if not last then
    return {'', {}, ''}
  end
end
-- Redis sorts the members of one due time by their bytes. Lua would compare them by the rules of a language.
local function passed(member)
  for i = 1, #ARGV[2] do
    local a, b = string.byte(member, i) or -1, string.byte(ARGV[2], i)
    if a ~= b then
      return a < b
    end
  end
  return true
end
local at, above = 0, ARGV[2] == '' and 0 or redis.call('ZCOUNT', KEYS[1], ARGV[1], ARGV[1])
while at < above do
  local middle = math.floor((at + above) / 2)
  if passed(redis.call('ZRANGEBYSCORE', KEYS[1], ARGV[1], ARGV[1], 'LIMIT', middle, 1)[1]) then
    at = middle + 1
  else
    above = middle
  end
end
local page, bytes, beginning = {}, 0, ''
while bytes < tonumber(ARGV[4]) and #page < tonumber(ARGV[5]) do
  local one = redis.call('ZRANGEBYSCORE', KEYS[1], ARGV[1], last, 'WITHSCORES', 'LIMIT', at, 1)
  if #one == 0 then
    return {last, page, ''}
  end
  at = at + 1
  local ok, copy = pcall(cmsgpack.unpack, one[1])
  local ours = ok and type(copy) == 'table' and #copy > 1 and #copy % 2 == 1
  for i = 1, ours and #copy or 0 do
    ours = ours and type(copy[i]) == 'string'
  end
  if ours and copy[1] ~= '' then
    bytes = bytes + #one[1]
    local mark = table.remove(copy, 1)
    local _, stop = string.find(one[1], mark, 1, true)
    beginning = string.sub(one[1], 1, stop)
    page[#page + 1] = {one[2], mark, copy}
  end
end
return {last, page, beginning}
