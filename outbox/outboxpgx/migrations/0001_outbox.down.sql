DROP TABLE {{table}}, {{lanes}}, {{dead}}, {{audit}}, {{dedup}};
