#!lua flags=allow-oom
-- Takes a lease that nobody holds, also without memory: only who consumes makes room.
-- KEYS[1] the lease; ARGV[1] the token; ARGV[2] for how many milliseconds.
-- Returns 1 when the lease is the token's, also when the client repeats itself, else 0.
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) or redis.call('GET', KEYS[1]) == ARGV[1] then
  return 1
end
return 0
