#!lua flags=allow-oom
-- Records that a process takes part, even if memory is full, and counts the processes that recently did so.
-- KEYS[1]: the processes by their last call. ARGV[1]: this process; ARGV[2]: how long (ms) a process is counted.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now - ARGV[2]))
redis.call('ZREMRANGEBYSCORE', KEYS[1], string.format('%.0f', now + ARGV[2]), '+inf') -- from before the clock was set back
redis.call('ZADD', KEYS[1], string.format('%.0f', now), ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return redis.call('ZCARD', KEYS[1])
