-- Decides about several questions, one after the other, as if each had come
-- alone; each counter is read and written once.
-- KEYS: the counters, each of its rule's number of windows from m0-1 on, or one
-- bucket.
-- ARGV[1]: a msgpack array of integers, for numbers in text cost as much as the
-- rest: number of rules; per rule: kind (0 sliding, 1 fixed window, 2 bucket),
-- window, max, burst, m0, number of keys; number of counters; per counter: its
-- rule, or one like it but for its max; then per question: take (1 or 0), within,
-- number of charges, and per charge: its rule, its counter, cost.
-- Returns the time and 1, or -1 if an m0 is off; then per question a verdict (1
-- admitted, 0 denied) and per charge the state before: previous and current
-- counter, or 0 and what is missing.
local p = cmsgpack.unpack(ARGV[1])
local values = call('MGET', unpack(KEYS))
local kind, window, most, burst, shift, rest, span = {}, {}, {}, {}, {}, {}, {}
local a = 2
for i = 1, p[1] do
  local w = p[a + 1]
  kind[i], window[i], most[i], span[i] = p[a], w, p[a + 2], p[a + 5]
  if p[a] == 2 then
    burst[i], shift[i], rest[i] = p[a + 3] * w, 0, 0
  else
    local m = floor(now / w)
    local d = m - p[a + 4]
    if d < 0 or d > span[i] - 2 then return {now, -1} end
    burst[i], shift[i], rest[i] = p[a + 2] * w, d + 1, w - (now - m * w)
  end
  a = a + 6
end

local counters = p[a]
local rule, prev, before, cur, key = {}, {}, {}, {}, {}
local k = 1
for j = 1, counters do
  local i = p[a + j]
  local at, past = k + shift[i], 0
  local value = values[at]
  if kind[i] == 2 then
    value = missing(value, window[i], most[i])
  else
    value = value and count(value) or 0
    if values[at - 1] then past = count(values[at - 1]) end
  end
  rule[j], prev[j], before[j], cur[j], key[j] = i, past, value, value, at
  k = k + span[i]
end

local reply, r = {now, 1}, 2
local last = #p
a = a + counters + 1
while a <= last do
  local take, within, stop, ok = p[a], p[a + 1], a + 3 * p[a + 2], 1
  local verdict = r + 1
  r = verdict
  for c = a + 3, stop, 3 do
    local i, j = p[c], p[c + 1]
    local w, used = window[i], cur[j]
    reply[r + 1], reply[r + 2] = prev[j], used
    r = r + 2
    if kind[i] == 2 then
      used = used - within * most[i]
    elseif kind[i] == 1 then
      used = used * w
    else
      used = prev[j] * rest[i] + used * w
    end
    if used + p[c + 2] * w > burst[i] then ok = 0 end
  end
  reply[verdict] = ok
  if ok == take and ok == 1 then
    for c = a + 3, stop, 3 do
      local i, j, cost = p[c], p[c + 1], p[c + 2]
      if kind[i] == 2 then cost = cost * window[i] end
      cur[j] = cur[j] + cost
    end
  end
  a = stop + 3
end

for j = 1, counters do
  local added, i = cur[j] - before[j], rule[j]
  if added ~= 0 then
    local name = KEYS[key[j]]
    if kind[i] == 2 then
      keep(name, cur[j], most[i])
    elseif before[j] == 0 or type(redis.pcall('INCRBY', name, added)) == 'table' then
      call('SET', name, cur[j], 'PX', window[i] + rest[i] + 1000) -- new, or no plain number
    end
  end
end
return reply
