<?php

// Symfony Messenger with the parts that an application has: bus, worker, retries and failure transport, on
// RabbitMQ or Redis. The first argument is a task in JSON. The output has one line of JSON per event.

foreach (['Messenger', 'Serializer', 'PropertyAccess', 'PropertyInfo', 'EventDispatcher', 'ErrorHandler'] as $component) {
    require_once "/usr/share/php/Symfony/Component/$component/autoload.php";
}
require __DIR__.'/app.php';
error_reporting(\E_ALL & ~\E_DEPRECATED & ~\E_USER_DEPRECATED);

use App\Message\OrderPlaced;
use Symfony\Component\EventDispatcher\EventDispatcher;
use Symfony\Component\Messenger\Bridge\Amqp\Transport\AmqpReceivedStamp;
use Symfony\Component\Messenger\Bridge\Amqp\Transport\AmqpStamp;
use Symfony\Component\Messenger\Bridge\Amqp\Transport\AmqpTransportFactory;
use Symfony\Component\Messenger\Bridge\Redis\Transport\RedisTransportFactory;
use Symfony\Component\Messenger\Envelope;
use Symfony\Component\Messenger\Event\WorkerMessageFailedEvent;
use Symfony\Component\Messenger\Event\WorkerRunningEvent;
use Symfony\Component\Messenger\EventListener\AddErrorDetailsStampListener;
use Symfony\Component\Messenger\EventListener\SendFailedMessageForRetryListener;
use Symfony\Component\Messenger\EventListener\SendFailedMessageToFailureTransportListener;
use Symfony\Component\Messenger\EventListener\StopWorkerOnTimeLimitListener;
use Symfony\Component\Messenger\Exception\MessageDecodingFailedException;
use Symfony\Component\Messenger\Handler\HandlersLocator;
use Symfony\Component\Messenger\MessageBus;
use Symfony\Component\Messenger\Middleware\AddBusNameStampMiddleware;
use Symfony\Component\Messenger\Middleware\FailedMessageProcessingMiddleware;
use Symfony\Component\Messenger\Middleware\HandleMessageMiddleware;
use Symfony\Component\Messenger\Middleware\RejectRedeliveredMessageMiddleware;
use Symfony\Component\Messenger\Middleware\SendMessageMiddleware;
use Symfony\Component\Messenger\Retry\MultiplierRetryStrategy;
use Symfony\Component\Messenger\Stamp\DelayStamp;
use Symfony\Component\Messenger\Stamp\RedeliveryStamp;
use Symfony\Component\Messenger\Transport\Sender\SendersLocator;
use Symfony\Component\Messenger\Transport\Serialization\PhpSerializer;
use Symfony\Component\Messenger\Transport\Serialization\Serializer;
use Symfony\Component\Messenger\Worker;
use Symfony\Component\PropertyInfo\Extractor\ReflectionExtractor;
use Symfony\Component\PropertyInfo\PropertyInfoExtractor;
use Symfony\Component\Serializer\Encoder\JsonEncoder;
use Symfony\Component\Serializer\Normalizer\ArrayDenormalizer;
use Symfony\Component\Serializer\Normalizer\DateTimeNormalizer;
use Symfony\Component\Serializer\Normalizer\ObjectNormalizer;

/** The services of an application by their names. */
final class Services implements \Psr\Container\ContainerInterface
{
    public function __construct(private array $services)
    {
    }

    public function get(string $id)
    {
        return $this->services[$id];
    }

    public function has(string $id): bool
    {
        return isset($this->services[$id]);
    }
}

function tell(string $what, array $more = []): void
{
    echo json_encode(['event' => $what] + $more, \JSON_THROW_ON_ERROR | \JSON_UNESCAPED_SLASHES), "\n";
}

function serializer(string $kind): Serializer|PhpSerializer
{
    $extractor = new ReflectionExtractor();
    $types = new PropertyInfoExtractor([$extractor], [$extractor], [], [$extractor], [$extractor]);
    $symfony = new \Symfony\Component\Serializer\Serializer([
        new \Symfony\Component\Messenger\Transport\Serialization\Normalizer\FlattenExceptionNormalizer(),
        new DateTimeNormalizer(), new ArrayDenormalizer(), new ObjectNormalizer(null, null, null, $types),
    ], [new JsonEncoder()]);

    return match ($kind) {
        'json' => new Serializer($symfony),
        'names' => new \App\Messenger\NameSerializer($symfony),
        'php' => new PhpSerializer(),
    };
}

/** The transport "orders", or the failure transport. It does not create foreign queues. */
function transport(array $do, string $name)
{
    $serializer = serializer($do['serializer']);
    if ('redis' === $do['broker']) {
        return (new RedisTransportFactory())->createTransport($do['dsn'], [
            'stream' => $name, 'group' => 'php', 'consumer' => 'c', 'dbindex' => $do['dbindex'], 'delete_after_ack' => false, 'delete_after_reject' => false,
        ], $serializer);
    }
    if ('orders' === $name) {
        $options = [
            'exchange' => ['name' => $name, 'type' => 'topic', 'default_publish_routing_key' => 'order.placed'],
            'queues' => ['orders.php' => ['binding_keys' => ['order.#']]],
        ];
    } elseif ('orders.failed' === $name) {
        $options = ['exchange' => ['name' => $name], 'queues' => ['orders.failed.php' => []]];
    } else {
        $options = ['queues' => [$name => []], 'auto_setup' => false];
    }

    return (new AmqpTransportFactory())->createTransport($do['dsn'], $options, $serializer);
}

function send(array $do, MessageBus $bus): void
{
    foreach ($do['messages'] as $m) {
        $stamps = [];
        if (isset($m['stamp'])) {
            $stamps[] = new ($m['stamp'])($m['id']);
            if (\Freyr\MessageBroker\Inbox\MessageIdStamp::class === $m['stamp']) {
                $stamps[] = new \Freyr\MessageBroker\Serializer\MessageNameStamp('order.placed');
            }
        } elseif ('amqp' === $do['broker']) {
            $stamps[] = new AmqpStamp(null, \AMQP_NOPARAM, ['message_id' => $m['id'], 'headers' => ['tenant' => 'php']]);
        }
        if (isset($m['delay'])) {
            $stamps[] = new DelayStamp($m['delay']);
        }
        $bus->dispatch(new OrderPlaced($m['orderId'], $m['total']), $stamps);
        tell('sent', ['orderId' => $m['orderId']]);
    }
}

/** A handler's view of its message. */
function seen(Envelope $envelope): array
{
    $message = $envelope->getMessage();
    $known = ['class' => $message::class, 'orderId' => $message->orderId, 'total' => $message->total, 'retry' => RedeliveryStamp::getRetryCountFromEnvelope($envelope)];
    foreach ([\App\Messenger\MessageIdStamp::class, \Freyr\MessageBroker\Inbox\MessageIdStamp::class] as $class) {
        if ($stamp = $envelope->last($class)) {
            $known['stamp'] = $stamp->messageId;
        }
    }
    if ($stamp = $envelope->last(\Freyr\MessageBroker\Serializer\MessageNameStamp::class)) {
        $known['name'] = $stamp->messageName;
    }
    if ($stamp = $envelope->last(AmqpReceivedStamp::class)) {
        $amqp = $stamp->getAmqpEnvelope();
        $known += ['message_id' => $amqp->getMessageId(), 'type' => $amqp->getType(), 'tenant' => $amqp->getHeaders()['tenant'] ?? null];
    }

    return $known;
}

/** Fails N times for an order "fail-N". */
function handle(Envelope $envelope): void
{
    $message = $envelope->getMessage();
    $retry = RedeliveryStamp::getRetryCountFromEnvelope($envelope);
    tell('handling', seen($envelope));
    if (preg_match('/^fail-(\d+)/', $message->orderId, $times) && $retry < (int) $times[1] && !getenv('MENDED')) {
        throw new \RuntimeException("broken for the time being: $message->orderId");
    }
    tell('handled', ['orderId' => $message->orderId]);
}

/** A middleware that passes the envelope to the handler. */
final class Remember implements \Symfony\Component\Messenger\Middleware\MiddlewareInterface
{
    public static Envelope $envelope;

    public function handle(Envelope $envelope, \Symfony\Component\Messenger\Middleware\StackInterface $stack): Envelope
    {
        self::$envelope = $envelope;

        return $stack->next()->handle($envelope, $stack);
    }
}

function consume(array $do, MessageBus $bus, array $transports): void
{
    $strategy = new MultiplierRetryStrategy(2, 200, 2);
    $events = new EventDispatcher();
    $events->addSubscriber(new AddErrorDetailsStampListener());
    $events->addSubscriber(new SendFailedMessageForRetryListener(new Services($transports), new Services(['orders' => $strategy]), null, $events));
    $events->addSubscriber(new SendFailedMessageToFailureTransportListener(new Services(['orders' => $transports['orders.failed']])));
    $events->addSubscriber(new StopWorkerOnTimeLimitListener($do['seconds']));
    $settled = 0;
    $events->addListener(WorkerMessageFailedEvent::class, function ($event) use (&$settled, $do) {
        tell($event->willRetry() ? 'retried' : 'failed', ['orderId' => $event->getEnvelope()->getMessage()->orderId]);
        $settled += $event->willRetry() && !isset($do['once']) ? 0 : 1;
    }, -200);
    $events->addListener(\Symfony\Component\Messenger\Event\WorkerMessageHandledEvent::class, function () use (&$settled) {
        ++$settled;
    });
    $events->addListener(WorkerRunningEvent::class, function ($event) use (&$settled, $do) {
        if ($settled >= $do['limit']) {
            $event->getWorker()->stop();
        }
    });
    $from = $do['from'] ?? 'orders';
    $worker = new Worker([$from => $transports[$from]], $bus, $events);
    try {
        $worker->run(['sleep' => 50000]);
    } catch (MessageDecodingFailedException $e) {
        tell('undecodable', ['error' => $e->getMessage()]);
    }
}

$do = json_decode($argv[1], true, 32, \JSON_THROW_ON_ERROR);
$from = $do['from'] ?? 'orders';
$transports = ['orders' => transport($do, 'orders'), 'orders.failed' => transport($do, 'orders.failed')];
$transports += [$from => transport($do, $from)];
$remember = new Remember();
$bus = new MessageBus([
    new AddBusNameStampMiddleware('messenger.bus.default'),
    new RejectRedeliveredMessageMiddleware(),
    new FailedMessageProcessingMiddleware(),
    $remember,
    new SendMessageMiddleware(new SendersLocator([OrderPlaced::class => ['orders']], new Services($transports))),
    new HandleMessageMiddleware(new HandlersLocator([OrderPlaced::class => [fn () => handle(Remember::$envelope)]])),
]);
$transports['orders']->setup();
$transports['orders.failed']->setup();
if ('send' === $do['action']) {
    send($do, $bus);
} elseif ('consume' === $do['action']) {
    consume($do, $bus, $transports);
}
tell('end', ['php' => \PHP_VERSION]);
