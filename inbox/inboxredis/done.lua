-- Marks a message as processed. It replaces a claim that was lost meanwhile, because the message has taken effect. An
-- existing mark stays, with its expiry.
-- KEYS[1]: the message's key. ARGV[1]: the claim's value; ARGV[2]: the mark; ARGV[3]: its time to live (ms).
-- Returns 1, or 0 if the caller had lost the claim.
local held
if redis.call('TYPE', KEYS[1]).ok == 'string' then
  held = redis.call('GET', KEYS[1])
end
if held == ARGV[1] or held == ARGV[2] then -- the second if the client repeats the call
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
  return 1
end
if redis.call('EXISTS', KEYS[1]) == 0 or (held and string.sub(held, 1, 11) == 'processing:') then
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
end
return 0
