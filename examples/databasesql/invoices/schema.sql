CREATE TABLE invoices (
    order_id text   NOT NULL,
    cents    bigint NOT NULL
);
