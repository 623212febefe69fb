-- Frees the key.
-- KEYS: record, lock. ARGV: token.
local holder = redis.call('GET', KEYS[2])
if not holder or string.sub(holder, 1, #ARGV[1] + 1) ~= ARGV[1] .. ':' then
  return 0
end
redis.call('DEL', KEYS[2])
return 1
