"""The daemon's sockets: gRPC, descriptors, metrics; start, supervision and shutdown."""
