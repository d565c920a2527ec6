"""The node: keeper, hand, standby, ledger, wire, and the node's command line."""
