DROP TABLE {{table}}, {{attempts}}, {{pause}};
