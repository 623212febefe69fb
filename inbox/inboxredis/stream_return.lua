-- Puts a dead letter into a stream again, if it is still there.
-- KEYS[1] the dead letters; KEYS[2] the stream; ARGV[1] the letter's id; then fields.
-- Returns 1, or 0 when the letter is gone.
if #redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1]) == 0 then
  return 0
end
redis.call('XADD', KEYS[2], '*', unpack(ARGV, 2))
redis.call('XDEL', KEYS[1], ARGV[1])
return 1
