-- KEYS as in decide.lua. ARGV per limit: kind, window, max, cost (of a bucket:
-- times the window), since (0 = now), m0. Returns the time and 1, or -1 if an m0
-- is wrong. It writes only after checking every m0.
local n, k = 0, 1
local plan = {}
for a = 1, #ARGV, 6 do
  local w, max, cost, since = tonumber(ARGV[a + 1]), tonumber(ARGV[a + 2]), tonumber(ARGV[a + 3]), tonumber(ARGV[a + 4])
  if since == 0 then since = now end
  n = n + 1
  if ARGV[a] ~= '2' then
    local m = math.floor(now / w)
    local d = m - tonumber(ARGV[a + 5])
    if d < 0 or d > 1 then return {now, -1} end
    local age = m - math.floor(since / w)
    if age == 0 or age == 1 then
      local ttl = (2 - age) * w - (now - m * w) + 1000
      plan[n] = {key = KEYS[k + d + 1 - age], cost = cost, ttl = ttl}
    end
    k = k + 3
  else
    local back = math.max(0, cost - math.max(0, now - since) * max)
    plan[n] = {key = KEYS[k], cost = back, max = max}
    k = k + 1
  end
end

for i = 1, n do
  local p = plan[i]
  local value = p and call('MGET', p.key)[1] -- false for a value that is not a string
  if value and p.ttl then
    local rest = count(value) - p.cost
    if rest > 0 then call('SET', p.key, rest, 'PX', p.ttl) else call('DEL', p.key) end
  elseif value then
    local rest = missing(value, p.max) - p.cost
    if rest > 0 then keep(p.key, rest, p.max) else call('DEL', p.key) end
  end
end
return {now, 1}
