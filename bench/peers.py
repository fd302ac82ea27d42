import sys, time, argparse
import gymnasium, numpy as np, torch
from redline import oracles, games
class PlainSnake(gymnasium.Env):
    def __init__(self, seed=0):
        self.o=oracles.load('snake'); self.c=games.load('snake').Config()
        self.observation_space=gymnasium.spaces.Box(0,100,(3,10,10),np.float32); self.action_space=gymnasium.spaces.Discrete(4)
        self.seed=seed; self.ep=0
    def _obs(self):
        g=self.g; n=len(g.body); out=np.zeros((3,100),np.float32)
        for i,(r,c) in enumerate(g.body): out[0,r*10+c]=(n-i)/100
        out[1,g.body[0][0]*10+g.body[0][1]]=1
        if g.food: out[2,g.food[0]*10+g.food[1]]=1
        return out.reshape(3,10,10)
    def reset(self,*,seed=None,options=None):
        super().reset(seed=seed)
        if seed is not None: self.seed=seed
        self.g=self.o(self.c, oracles.episode_key(self.seed,0,self.ep)); self.ep+=1
        return self._obs(),{}
    def step(self,a):
        r,te,tr,s,w=self.g.step(int(a)); return self._obs(),r,te,tr,{}
if __name__=='__main__':
    from stable_baselines3 import DQN
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv
    for V in (DummyVecEnv,SubprocVecEnv):
        env=V([PlainSnake]*8)
        m=DQN('MlpPolicy',env,policy_kwargs=dict(net_arch=[256]*3),batch_size=128,train_freq=4,learning_starts=1000,buffer_size=50000,device='cpu')
        m.learn(4000)
        t=time.time(); n0=m._n_updates; m.learn(20000,reset_num_timesteps=False); dt=time.time()-t
        print(V.__name__, 20000/dt,'env-steps/s', (m._n_updates-n0)*128/dt,'samples/s', flush=True)
        env.close()
