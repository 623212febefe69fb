-- Counts dead letters without returning any.
-- KEYS[1]: the dead letters.
-- Returns {number, id of the oldest}, or {0, ""} if there are none.
local oldest = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
if not oldest then
  return {0, ''}
end
return {redis.call('XLEN', KEYS[1]), oldest[1]}
