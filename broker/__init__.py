"""The durable table of write-once cells on NATS JetStream, and tensors by reference beside it."""
