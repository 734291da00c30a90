from django.contrib import admin

from .models import Seats, Ticket

admin.site.register([Seats, Ticket])
