-- Removes the names of dead consumers that have no pending entries.
-- KEYS[1]: the stream. ARGV[1]: the group; ARGV[2]: the idle time (ms) of a dead consumer.
for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local info = {}
  for n = 1, #consumer, 2 do
    info[consumer[n]] = consumer[n + 1]
  end
  if info['pending'] == 0 and info['idle'] > tonumber(ARGV[2]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], info['name'])
  end
end
return 1
