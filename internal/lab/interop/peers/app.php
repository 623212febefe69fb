<?php

// The application's own classes: a message, and stamps.

namespace Freyr\MessageBroker\Inbox {
    final class MessageIdStamp implements \Symfony\Component\Messenger\Stamp\StampInterface
    {
        public function __construct(public string $messageId)
        {
        }
    }
}

namespace Freyr\MessageBroker\Serializer {
    final class MessageNameStamp implements \Symfony\Component\Messenger\Stamp\StampInterface
    {
        public function __construct(public string $messageName)
        {
        }
    }
}

namespace App\Messenger {
    use Symfony\Component\Messenger\Envelope;
    use Symfony\Component\Messenger\Transport\Serialization\Serializer;

    final class MessageIdStamp implements \Symfony\Component\Messenger\Stamp\StampInterface
    {
        public function __construct(public string $messageId)
        {
        }
    }

    /** Uses names instead of classes, like freyr/message-broker. */
    final class NameSerializer extends Serializer
    {
        private const NAMES = [\App\Message\OrderPlaced::class => 'order.placed'];

        public function encode(Envelope $envelope): array
        {
            $encoded = parent::encode($envelope);
            $encoded['headers']['type'] = self::NAMES[$encoded['headers']['type']];

            return $encoded;
        }

        public function decode(array $encoded): Envelope
        {
            $encoded['headers']['type'] = array_flip(self::NAMES)[$encoded['headers']['type']] ?? 'unknown';

            return parent::decode($encoded);
        }
    }
}

namespace App\Message {
    final class OrderPlaced
    {
        public function __construct(public string $orderId, public int $total)
        {
        }
    }
}
