-- Releases the caller's claim.
-- KEYS[1]: the message's key. ARGV[1]: the claim's value.
if redis.call('TYPE', KEYS[1]).ok == 'string' and redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
