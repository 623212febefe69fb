#!lua flags=allow-oom
-- Changes the due time of a waiting message, or removes the message, even if memory is full: it needs none.
-- KEYS[1]: the waiting messages. ARGV[1]: its due time (ms); ARGV[2]: its mark, the first part of a member; ARGV[3]: the
-- delay (ms) from now, or "" to remove it.
-- Returns 1, or 0 if it no longer waits until that time.
local at = 0
while true do
  local member = redis.call('ZRANGEBYSCORE', KEYS[1], ARGV[1], ARGV[1], 'LIMIT', at, 1)[1]
  if not member then
    return 0
  end
  local ok, copy = pcall(cmsgpack.unpack, member)
  if ok and type(copy) == 'table' and copy[1] == ARGV[2] then
    if ARGV[3] == '' then
      return redis.call('ZREM', KEYS[1], member)
    end
    local now = redis.call('TIME')
    local due = now[1] * 1000 + math.ceil(now[2] / 1000) + ARGV[3]
    redis.call('ZADD', KEYS[1], 'XX', string.format('%.0f', due), member)
    return 1
  end
  at = at + 1
end
