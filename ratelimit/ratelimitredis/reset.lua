-- KEYS and ARGV as in refund.lua. Returns the time and 1, or -1 if an m0 is wrong.
for a = 1, #ARGV, 6 do
  if ARGV[a] ~= '2' then
    local d = floor(now / ARGV[a + 1]) - ARGV[a + 5]
    if d < 0 or d > 1 then return {now, -1} end
  end
end
call('DEL', unpack(KEYS))
return {now, 1}
