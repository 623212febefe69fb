-- Returns a dead letter to a stream, if it still exists.
-- KEYS[1]: the dead letters; KEYS[2]: the stream. ARGV[1]: the letter's id; then fields.
-- Returns 1, or 0 if the letter no longer exists.
if #redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1]) == 0 then
  return 0
end
redis.call('XADD', KEYS[2], '*', unpack(ARGV, 2))
redis.call('XDEL', KEYS[1], ARGV[1])
return 1
