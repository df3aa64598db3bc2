from makeway import SamplingParams
from makeway.server.queue import FairQueue
from makeway.server.ticket import Ticket


def ticket(client):
    return Ticket(client, [1], SamplingParams(), mailbox=None)


def test_clients_take_turns():
    queue = FairQueue(10)
    tickets = {name: ticket(name[0]) for name in ("a1", "a2", "a3", "b1", "c1", "b2")}
    for one in tickets.values():
        queue.push(one)
    order = ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert [queue.position(tickets[name]) for name in order] == list(range(6))
    popped = [queue.pop() for _ in range(3)]
    queue.push(late := ticket("d"))
    popped += [queue.pop() for _ in range(4)]
    assert popped == [tickets[n] for n in ("a1", "b1", "c1", "a2", "b2")] + [late, tickets["a3"]]
    assert queue.pop() is None
    assert len(queue) == 0


def test_one_can_leave_at_any_place():
    queue = FairQueue(4)
    first, second, third = ticket("a"), ticket("a"), ticket("b")
    for one in (first, second, third):
        queue.push(one)
    assert queue.remove(first)
    assert not queue.remove(first)
    assert queue.position(first) is None
    assert queue.remove(third)
    assert not queue.remove(ticket("c"))
    assert len(queue) == 1
    assert queue.pop() is second


def test_the_limit_counts_all_clients():
    queue = FairQueue(2)
    queue.push(ticket("a"))
    assert queue.has_room(1)
    assert not queue.has_room(2)
    queue.push(ticket("b"))
    assert not queue.has_room(1)
    assert len(queue.drain()) == 2
    assert queue.has_room(2)
    assert queue.drain() == []
