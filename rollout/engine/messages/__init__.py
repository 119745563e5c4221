"""Plain data that passes between the service and the engine.

The service turns messages into commands and events into messages. The engine turns commands into steps and steps into
events. Neither has a reference to the other's objects.

    service --Command--> engine.inbox          engine --Event--> service.outbox

The weight receiver, too, puts a command into the inbox: `NextTick`. Both queues are FIFO and thread-safe. Arrays are
frozen by convention: no code writes to an array after it was sent.
"""
