DROP TABLE holdfast_operator_log;
