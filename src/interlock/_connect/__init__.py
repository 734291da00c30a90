"""Turns what the user names into data: an address, a cluster, a quorum.

target         chooses by what the user named;  urls, url_options, clients: of a URL, of a client of redis-py
address        one server as data, and redis-py's connection to it
clusters       a cluster as data;  sentinels: who is the primary
server_check   can this server keep the promises?;  refusals: the error of a connection that failed
"""
