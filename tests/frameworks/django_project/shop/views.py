"""What the tests of the web servers ask for."""

import asyncio
import os
import time

from django.conf import settings
from django.db import transaction
from django.db.models import Count
from django.http import HttpResponse, JsonResponse

import interlock
from interlock.contrib.django import alocks, locks
from shop.models import Note, Order


def who(request):
    return HttpResponse(os.getpid())


def orders(request, number):
    """Of each order its stock, and how many notes its buyers have committed."""
    for pk in range(1, number + 1):
        Order.objects.get_or_create(pk=pk)
    counted = Order.objects.annotate(notes=Count("note"))
    return JsonResponse({each.pk: [each.stock, each.notes] for each in counted})


def buy(request, pk):
    """Read, think, write: in a transaction, under the lock of the order until the commit."""
    pause = float(request.GET.get("pause", "0.001"))
    with transaction.atomic():
        with locks.lock(Order(pk=pk), until_commit=True, timeout=30, ttl=2):
            order = Order.objects.get(pk=pk)
            time.sleep(pause)
            order.stock += 1
            order.save()
            Note.objects.create(worker=os.getpid(), order=order)
        time.sleep(pause)  # the rest of the transaction, in which nobody else may read
    return JsonResponse({"stock": order.stock, "by": os.getpid()})


def careless(request, pk):
    """The same with the trap: the lock is released before the commit."""
    pause = float(request.GET.get("pause", "0.001"))
    with transaction.atomic():
        with locks.lock(Order(pk=pk), timeout=30, ttl=2):
            order = Order.objects.get(pk=pk)
            time.sleep(pause)
            order.stock += 1
            order.save()
        time.sleep(pause)
    return JsonResponse({"stock": order.stock})


def lose(request, pk):
    """Somebody takes the lock before the commit of the request."""
    with locks.lock(Order(pk=pk), until_commit=True) as lease:
        Order.objects.filter(pk=pk).update(stock=1000)
    with interlock.Interlock(settings.INTERLOCK["default"]["URL"]) as other:
        other.lock(lease.name).revoke("a test", force=True)
        assert lease.ended.wait(20)
    return HttpResponse("done")


def busy(request, name):
    with locks.lock(name, timeout=float(request.GET.get("timeout", "0"))):
        return HttpResponse("mine")


async def abusy(request, name):
    async with alocks.lock(name, timeout=float(request.GET.get("timeout", "0"))):
        return HttpResponse("mine")


async def ahold(request, name):
    async with alocks.lock(name, ttl=2):
        await asyncio.sleep(float(request.GET.get("pause", "1")))
        return HttpResponse("done")


def broken(request):
    raise LookupError("an error of the program")
