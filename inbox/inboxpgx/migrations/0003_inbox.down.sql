DROP TABLE {{table}}, {{attempts}};
