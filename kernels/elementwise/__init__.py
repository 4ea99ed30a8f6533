"""Norm, rotary embedding and gated activation: what happens to rows between the linears."""
