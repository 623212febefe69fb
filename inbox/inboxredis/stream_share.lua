#!lua flags=allow-oom
-- Notes that a process takes part, also without memory, and counts those that have said so lately.
-- KEYS[1] the processes, by when they were heard of; ARGV[1] this one; ARGV[2] for how many
-- milliseconds one counts.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now - ARGV[2]))
redis.call('ZREMRANGEBYSCORE', KEYS[1], string.format('%.0f', now + ARGV[2]), '+inf') -- of a clock that was set back
redis.call('ZADD', KEYS[1], string.format('%.0f', now), ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return redis.call('ZCARD', KEYS[1])
