-- KEYS: per limit, three counters (windows m0-1, m0, m0+1) or one bucket.
-- ARGV: take (1 or 0), within, then per limit: kind, window, max, burst, cost, m0.
-- Returns the time, a verdict (1 admitted, 0 denied, -1 m0 is off) and per limit
-- the state before: previous and current counter, or 0 and what is missing.
local values = redis.call('MGET', unpack(KEYS))
local within = tonumber(ARGV[2])
local reply, target, ttl = {now, 1}, {}, {}
local k, n = 1, 0

for a = 3, #ARGV, 6 do
  local w, max, cost = tonumber(ARGV[a + 1]), tonumber(ARGV[a + 2]), tonumber(ARGV[a + 4])
  n = n + 1
  if ARGV[a] == 'w' then
    local m = math.floor(now / w)
    local d = m - tonumber(ARGV[a + 5])
    if d < 0 or d > 1 then return {now, -1} end
    local left = w - (now - m * w)
    local prev, cur = count(values[k + d]), count(values[k + d + 1])
    if prev * left + (cur + cost) * w > max * w then reply[2] = 0 end
    reply[2 * n + 1], reply[2 * n + 2] = prev, cur
    target[n], ttl[n] = KEYS[k + d + 1], w + left + 1000
    k = k + 3
  else
    local used = missing(values[k], max)
    if used + cost * w > tonumber(ARGV[a + 3]) * w + within * max then reply[2] = 0 end
    reply[2 * n + 1], reply[2 * n + 2] = 0, used
    target[n] = KEYS[k]
    k = k + 1
  end
end

if reply[2] == 0 or ARGV[1] == '0' then return reply end
for i = 1, n do
  local a = 6 * i - 3
  local before, cost = reply[2 * i + 2], tonumber(ARGV[a + 4])
  if ttl[i] then
    redis.call('SET', target[i], before + cost, 'PX', ttl[i])
  else
    keep(target[i], before + cost * ARGV[a + 1], tonumber(ARGV[a + 2]))
  end
end
return reply
