#!lua flags=allow-oom
-- Takes retries that are due to their stream, also without memory: it needs none in the end, and only
-- who consumes makes room.
-- KEYS[1] those that wait; KEYS[2] the stream; ARGV[1] how many at once.
-- Returns in how many milliseconds the next is due; -1 when there is none.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now), 'LIMIT', 0, ARGV[1])) do
  local ok, copy = pcall(cmsgpack.unpack, member)
  local ours = ok and type(copy) == 'table' and #copy > 1 and #copy % 2 == 1
  for i = 1, ours and #copy or 0 do
    ours = ours and type(copy[i]) == 'string'
  end
  if not ours then
    copy = {'', 'body', member} -- a dead letter soon
  end
  redis.call('XADD', KEYS[2], '*', unpack(copy, 2))
  redis.call('ZREM', KEYS[1], member)
end
local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
if #first == 0 then
  return -1
end
return math.max(tonumber(first[2]) - now, 0)
