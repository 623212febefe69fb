"""Messages in Python, with pika, redis and psycopg2. The first argument is a task in JSON. The output has one line
of JSON per event."""

import json
import os
import sys
import time
import uuid
import zlib

import pika
import psycopg2
import redis


def tell(event, **more):
    print(json.dumps({"event": event, **more}))


def uuid7():
    """48 bits of milliseconds, and a random rest."""
    value = int(time.time() * 1000) << 80 | int.from_bytes(os.urandom(10), "big")
    value = value & ~(0xF << 76) | 7 << 76
    value = value & ~(3 << 62) | 2 << 62
    return str(uuid.UUID(int=value))


def send(do, channel):
    channel.confirm_delivery()
    for m in do["messages"]:
        message_id = uuid7()
        headers = {"tenant": "python", "number": 7}
        if "key" in m:
            headers["holdfast-key"] = m["key"]
            headers["CC"] = ["holdfast.slot.%d" % (zlib.crc32(m["key"].encode()) % 64)]
        channel.basic_publish("orders", "order.placed", json.dumps(m), pika.BasicProperties(
            message_id=message_id, type="order.placed", content_type="application/json", delivery_mode=2, headers=headers))
        tell("sent", orderId=m["orderId"], message_id=message_id)


def receive(do, channel):
    for method, properties, body in channel.consume(do["from"], inactivity_timeout=30):
        if method is None:
            break
        tell("received", message_id=properties.message_id, type=properties.type, content_type=properties.content_type or "application/json",
             written=properties.timestamp or (uuid.UUID(properties.message_id).int >> 80) // 1000, headers=properties.headers or {}, body=body.decode())
        channel.basic_ack(method.delivery_tag)
        do["limit"] -= 1
        if not do["limit"]:
            break


def add(do, client):
    for m in do["messages"]:
        entry = {"id": uuid7(), "name": "order.placed", "body": json.dumps(m)}
        if "key" in m:
            entry |= {"key": m["key"], "content-type": "application/json", "headers": json.dumps({"tenant": "python"})}
        client.xadd(do["stream"], entry)
        tell("sent", orderId=m["orderId"], message_id=entry["id"])


def read(do, client):
    client.xgroup_create(do["stream"], "python", id="0", mkstream=True)
    for _, entries in client.xreadgroup("python", "c", {do["stream"]: ">"}, count=10, block=30000):
        for number, e in entries:
            tell("received", message_id=e["id"], type=e["name"], key=e["key"], content_type=e["content-type"],
                 created_at=e["created-at"], headers=json.loads(e["headers"]), body=e["body"])
            client.xack(do["stream"], "python", number)
    tell("left", pending=client.xpending(do["stream"], "python")["pending"])


def write(do):
    connection = psycopg2.connect(do["postgres"])
    cursor = connection.cursor()
    cursor.execute("SET search_path TO " + do["schema"])
    connection.commit()
    for m in do["messages"]:
        try:
            cursor.execute("SELECT holdfast_outbox_write(%s, %s, key => %s, headers => %s)",
                           (m["name"], json.dumps(m), m.get("key"), json.dumps({"tenant": "python"})))
            tell("written", orderId=m["orderId"], message_id=cursor.fetchone()[0])
            connection.commit()
        except psycopg2.Error as refused:
            tell("refused", orderId=m["orderId"], error=refused.pgcode + " " + str(refused))
            connection.rollback()


do = json.loads(sys.argv[1])
if do["action"] == "write":
    write(do)
elif "redis" in do:
    {"send": add, "receive": read}[do["action"]](do, redis.Redis.from_url(do["redis"], decode_responses=True))
else:
    connection = pika.BlockingConnection(pika.URLParameters(do["dsn"]))
    {"send": send, "receive": receive}[do["action"]](do, connection.channel())
    connection.close()
tell("end")
