-- name: AddInvoice :exec
INSERT INTO invoices (order_id, cents) VALUES ($1, $2);

-- name: SumInvoices :one
SELECT count(*) AS invoices, coalesce(sum(cents), 0)::bigint AS cents FROM invoices WHERE order_id = $1;
