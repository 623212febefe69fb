-- Frees the key.
-- KEYS: record, lock. ARGV: token.
if redis.call('GET', KEYS[2]) ~= ARGV[1] then
  return 0
end
if redis.call('HGET', KEYS[1], 'status') == 'processing' then -- another system's answer stays
  redis.call('DEL', KEYS[1])
end
redis.call('DEL', KEYS[2])
return 1
