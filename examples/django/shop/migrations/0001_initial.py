from django.db import migrations, models

ID = ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID"))


class Migration(migrations.Migration):
    initial = True
    dependencies = []
    operations = [
        migrations.CreateModel(
            name="Seats",
            fields=[ID, ("show", models.CharField(max_length=100)), ("left", models.IntegerField())],
        ),
        migrations.CreateModel(
            name="Ticket",
            fields=[
                ID,
                ("number", models.IntegerField()),
                ("seats", models.ForeignKey(on_delete=models.CASCADE, to="shop.seats")),
            ],
        ),
    ]
