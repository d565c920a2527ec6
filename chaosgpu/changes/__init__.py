"""The few reversible primitives every fault is built from."""
