DROP TABLE {{table}};
