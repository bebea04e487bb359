"""Hosts: the libraries whose models and Trainer this package computes for, a folder each.

A host's folder says what a decoder layer is to that host: how it is called, which positions, masks and caches it is
given, what travels between pipeline stages, and what configurations and the weights of checkpoints are called. It
imports its host and no other one. What all hosts share is `paddle_te.models`.
"""
