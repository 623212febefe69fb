#!lua flags=allow-oom
-- Moves due retries to their stream, even if memory is full: the move needs none in the end, and only consuming frees
-- memory.
-- KEYS[1]: the waiting retries; KEYS[2]: the stream. ARGV[1]: the maximum number.
-- Returns the time (ms) until the next is due, or -1 if there is none.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now), 'LIMIT', 0, ARGV[1])) do
  local ok, copy = pcall(cmsgpack.unpack, member)
  local ours = ok and type(copy) == 'table' and #copy > 1 and #copy % 2 == 1
  for i = 1, ours and #copy or 0 do
    ours = ours and type(copy[i]) == 'string'
  end
  if not ours then
    copy = {'', 'body', member} -- it becomes a dead letter
  end
  redis.call('XADD', KEYS[2], '*', unpack(copy, 2))
  redis.call('ZREM', KEYS[1], member)
end
local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
if #first == 0 then
  return -1
end
return math.max(tonumber(first[2]) - now, 0)
