-- KEYS: per limit, three counters (windows m0-1, m0, m0+1) or one bucket.
-- ARGV: take (1 or 0), within, then per limit: kind (w sliding, f fixed window,
-- b bucket), window, max, burst, cost, m0.
-- Returns the time, a verdict (1 admitted, 0 denied, -1 m0 is off) and per limit
-- the state before: previous and current counter, or 0 and what is missing.
local values = call('MGET', unpack(KEYS))
local reply, ok = {now, 1}, true
local target, left = {}, {}
local k, n = 1, (#ARGV - 2) / 6

for i = 1, n do
  local a = 6 * i - 3
  local kind, w, max, cost = ARGV[a], ARGV[a + 1] + 0, ARGV[a + 2] + 0, ARGV[a + 4] + 0
  if kind == 'b' then
    local used = missing(values[k], w, max)
    if used + cost * w > ARGV[a + 3] * w + ARGV[2] * max then ok = false end
    reply[2 * i + 1], reply[2 * i + 2] = 0, used
    target[i] = k
    k = k + 1
  else
    local m = floor(now / w)
    local d = m - ARGV[a + 5]
    if d < 0 or d > 1 then return {now, -1} end
    local rest = w - (now - m * w)
    local prev, cur = 0, count(values[k + d + 1] or 0)
    if kind == 'w' then prev = count(values[k + d] or 0) end
    if prev * rest + (cur + cost) * w > max * w then ok = false end
    reply[2 * i + 1], reply[2 * i + 2] = prev, cur
    target[i], left[i] = k + d + 1, w + rest
    k = k + 3
  end
end

if not ok then reply[2] = 0 end
if not ok or ARGV[1] == '0' then return reply end
for i = 1, n do
  local a = 6 * i - 3
  local key, before = KEYS[target[i]], reply[2 * i + 2]
  if not left[i] then
    keep(key, before + ARGV[a + 4] * ARGV[a + 1], ARGV[a + 2] + 0)
  elseif before == 0 or type(redis.pcall('INCRBY', key, ARGV[a + 4])) == 'table' then
    call('SET', key, before + ARGV[a + 4], 'PX', left[i] + 1000) -- new, or no plain number
  end
end
return reply
