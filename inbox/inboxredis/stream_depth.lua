-- Counts dead letters without sending any.
-- KEYS[1] the dead letters.
-- Returns {how many, the id of the oldest}; {0, ""} when there is none.
local oldest = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
if not oldest then
  return {0, ''}
end
return {redis.call('XLEN', KEYS[1]), oldest[1]}
