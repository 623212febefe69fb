-- Starts the lease anew.
-- KEYS: record, lock. ARGV: token, lease (ms).
local holder = redis.call('GET', KEYS[2])
if not holder or string.sub(holder, 1, #ARGV[1] + 1) ~= ARGV[1] .. ':' then
  return 0
end
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return 1
