"""Horovod's way for TensorFlow 2: a DistributedGradientTape in a ``tf.function``, a broadcast after its first step."""

import sys

import horovod
import horovod.tensorflow as hvd
import tensorflow as tf


def train():
    hvd.init()
    gpus = tf.config.experimental.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:
        tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

    (images, labels), _ = tf.keras.datasets.mnist.load_data(path="mnist-%d.npz" % hvd.rank())
    dataset = tf.data.Dataset.from_tensor_slices(
        (tf.cast(images[..., tf.newaxis] / 255.0, tf.float32), tf.cast(labels, tf.int64))
    )
    dataset = dataset.repeat().shuffle(2000).batch(50)
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(8, [3, 3], activation="relu"),
            tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
            tf.keras.layers.Dropout(0.1),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(32, activation="relu"),
            tf.keras.layers.Dense(10, activation="softmax"),
        ]
    )
    loss_of = tf.losses.SparseCategoricalCrossentropy()
    opt = tf.optimizers.Adam(0.001 * hvd.size())
    checkpoint = tf.train.Checkpoint(model=model, optimizer=opt)

    @tf.function
    def training_step(images, labels, first_batch):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        opt.apply_gradients(zip(gradients, model.trainable_variables))
        if first_batch:  # after the step, so that the optimizer has its variables
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(opt.variables(), root_rank=0)
        return loss

    for batch, (x, y) in enumerate(dataset.take(160 // hvd.size())):
        loss = training_step(x, y, batch == 0)
        if batch % 20 == 0 and hvd.local_rank() == 0:
            print("Step #%d\tLoss: %.6f" % (batch, loss))
    if hvd.rank() == 0:
        checkpoint.save("./checkpoints/digits")
    return float(loss), sum(float(tf.reduce_sum(tf.abs(one))) for one in model.trainable_variables)


if __name__ == "__main__":
    if len(sys.argv) == 4:  # started by itself: NP HOSTS gloo|mpi
        ranks, hosts, communication = sys.argv[1:]
        use = {"use_gloo": communication == "gloo", "use_mpi": communication == "mpi"}
        results = horovod.run(train, np=int(ranks), hosts=hosts, verbose=2, **use)
    else:
        results = [train()]
    for loss, weights in results:
        print("loss %.2f weights %.6f" % (loss, weights))
