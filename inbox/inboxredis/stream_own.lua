#!lua flags=allow-oom
-- Takes a free lease, even if memory is full: only consuming frees memory.
-- KEYS[1]: the lease. ARGV[1]: the token; ARGV[2]: the lease (ms).
-- Returns 1 if the token has the lease, also when the client repeats a call, otherwise 0.
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) or redis.call('GET', KEYS[1]) == ARGV[1] then
  return 1
end
return 0
