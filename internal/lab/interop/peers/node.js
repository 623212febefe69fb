// Messages on Node.js, with amqplib and pg. The first argument is a task in JSON. The output has one line of
// JSON per event.

const crypto = require('node:crypto')
const amqplib = require('amqplib')
const { Client } = require('pg')

const tell = (event, more) => console.log(JSON.stringify({ event, ...more }))

// 48 bits of milliseconds, and a random rest.
function uuid7() {
  const bytes = crypto.randomBytes(16)
  bytes.writeUIntBE(Date.now(), 0, 6)
  bytes[6] = (bytes[6] & 0x0f) | 0x70
  bytes[8] = (bytes[8] & 0x3f) | 0x80
  return bytes.toString('hex').replace(/^(.{8})(.{4})(.{4})(.{4})(.{12})$/, '$1-$2-$3-$4-$5')
}

// zlib.crc32 is younger than the Node.js of Debian.
function crc32(text) {
  let sum = -1
  for (const byte of Buffer.from(text)) {
    sum ^= byte
    for (let bit = 0; bit < 8; bit++) sum = (sum >>> 1) ^ (sum & 1 ? 0xedb88320 : 0)
  }
  return (sum ^ -1) >>> 0
}

async function send(todo, connection) {
  const channel = await connection.createConfirmChannel()
  for (const m of todo.messages) {
    const messageId = uuid7()
    const headers = { tenant: 'node', number: 7 }
    if (m.key) {
      headers['holdfast-key'] = m.key
      headers.CC = ['holdfast.slot.' + (crc32(m.key) % 64)]
    }
    channel.publish('orders', 'order.placed', Buffer.from(JSON.stringify(m)), {
      messageId, type: 'order.placed', contentType: 'application/json', persistent: true, headers,
    })
    await channel.waitForConfirms()
    tell('sent', { orderId: m.orderId, message_id: messageId })
  }
}

// Defaults for missing properties: the body is JSON, and the time is in the first 48 bits of the id.
const contentTypeOf = (properties) => properties.contentType || 'application/json'
const writtenAt = ({ timestamp, messageId }) => timestamp || Math.floor(parseInt(messageId.replace(/-/g, '').slice(0, 12), 16) / 1000)

async function receive(todo, connection) {
  const channel = await connection.createChannel()
  await new Promise((resolve) => {
    const end = setTimeout(resolve, 30000)
    channel.consume(todo.from, (message) => {
      const { messageId, type, headers } = message.properties
      tell('received', {
        message_id: messageId, type, content_type: contentTypeOf(message.properties), written: writtenAt(message.properties),
        headers, body: message.content.toString(),
      })
      channel.ack(message)
      if (--todo.limit === 0) {
        clearTimeout(end)
        resolve()
      }
    })
  })
  await channel.close()
}

async function write(todo) {
  const client = new Client(todo.postgres)
  await client.connect()
  await client.query('SET search_path TO ' + todo.schema)
  for (const m of todo.messages) {
    try {
      const { rows } = await client.query('SELECT holdfast_outbox_write($1, $2, key => $3, headers => $4) AS id',
        [m.name, JSON.stringify(m), m.key, { tenant: 'node' }])
      tell('written', { orderId: m.orderId, message_id: rows[0].id })
    } catch (refused) {
      tell('refused', { orderId: m.orderId, error: refused.code + ' ' + refused.message })
    }
  }
  await client.end()
}

async function main() {
  const todo = JSON.parse(process.argv[2])
  if (todo.action === 'write') {
    await write(todo)
  } else {
    const connection = await amqplib.connect(todo.dsn)
    await { send, receive }[todo.action](todo, connection)
    await connection.close()
  }
  tell('end')
}

main()
