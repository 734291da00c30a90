from django.db import transaction
from django.http import JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from interlock.contrib.django import locks

from .models import Seats, Ticket


def show(request, pk):
    seats = Seats.objects.get(pk=pk)
    return JsonResponse({"show": seats.show, "left": seats.left, "sold": seats.ticket_set.count()})


@csrf_exempt  # for curl
@require_POST
@transaction.atomic
def buy(request, pk):
    # Until the commit: else the next buyer would read the old number of seats.
    with locks.lock(Seats(pk=pk), until_commit=True, timeout=10):
        seats = Seats.objects.get(pk=pk)
        if not seats.left:
            return JsonResponse({"sold out": seats.show}, status=409)
        ticket = Ticket.objects.create(seats=seats, number=seats.left)
        seats.left -= 1
        seats.save()
    return JsonResponse({"seat": ticket.number})
