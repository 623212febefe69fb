-- Extends the caller's claim.
-- KEYS[1]: the message's key. ARGV[1]: the claim's value; ARGV[2]: the lease (ms).
-- Returns 1, or 0 if the caller has lost the claim.
if redis.call('TYPE', KEYS[1]).ok == 'string' and redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 0
