DROP FUNCTION {{ignored}};
DROP TABLE {{table}}, {{lanes}}, {{dead}}, {{audit}}, {{pause}}, {{dedup}};
