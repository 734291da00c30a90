from django.db import models


class Seats(models.Model):
    show = models.CharField(max_length=100)
    left = models.IntegerField()

    def __str__(self) -> str:
        return f"{self.left} of {self.show}"


class Ticket(models.Model):
    seats = models.ForeignKey(Seats, models.CASCADE)
    number = models.IntegerField()

    def __str__(self) -> str:
        return f"seat {self.number} of {self.seats.show}"
